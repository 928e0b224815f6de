// A stand-in: submissions that include it use nothing but what mxnet/base.h has.
#include "base.h"
