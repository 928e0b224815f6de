// A stand-in: everything of mshadow that submissions use.
#include "../mshadow/tensor.h"
