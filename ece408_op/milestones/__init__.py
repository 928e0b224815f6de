"""What m1.py to m4.py share.

cli        ``main``: arguments, the printed lines of the course, checks, exit codes
inference  a whole network on a whole data set, and how its layers compare
"""
