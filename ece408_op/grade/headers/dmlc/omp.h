// A stand-in: OpenMP's own header, where it is on.
#ifdef _OPENMP
#include <omp.h>
#endif
