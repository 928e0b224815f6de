// What stands in front of a course submission: CUDA, and the stand-ins for MXNet's headers.
#pragma once
#include "cuda_fp16.h"
#include "ptx.h"
#include <ece408_grade/before.h>
#ifdef ECE408_WITH_MMA
#include "mma.h"
#endif
