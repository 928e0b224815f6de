// This folder is a place to stand on: from here a submission's "../mxnet_op.h" is found.
