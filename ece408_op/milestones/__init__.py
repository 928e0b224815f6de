"""What m1.py to m4.py share.

Public module: cli, whose ``main`` parses the arguments, runs the network, prints the course's lines and checks.
"""
