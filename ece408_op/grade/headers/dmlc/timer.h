// A stand-in for dmlc-core's timer.
#ifndef ECE408_GRADE_DMLC_TIMER_H_
#define ECE408_GRADE_DMLC_TIMER_H_
#include <chrono>

namespace dmlc {
// Seconds by a clock that never goes back.
inline double GetTime() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
}  // namespace dmlc

#endif  // ECE408_GRADE_DMLC_TIMER_H_
