// What stands in front of a kernel of the package: CUDA and the functions that its plan is translated to.
#pragma once
#include "ece408_emulator.h"
#include "ptx.h"
