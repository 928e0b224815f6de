// Found only where the toolkit has no such header: marks for a profiler, which nobody looks at here.
#ifndef ECE408_GRADE_FALLBACK_NVTX_H_
#define ECE408_GRADE_FALLBACK_NVTX_H_
inline int nvtxRangePushA(const char*) { return 0; }
inline int nvtxRangePush(const char*) { return 0; }
inline int nvtxRangePop() { return 0; }
inline void nvtxMarkA(const char*) {}
inline void nvtxMark(const char*) {}
#endif
