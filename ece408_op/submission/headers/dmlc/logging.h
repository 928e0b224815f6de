// A replacement for dmlc-core's checks and log lines, CHECK(x), CHECK_EQ(a, b) and LOG(INFO), each taking << text, and
// for its clock.
#pragma once
#include <chrono>
#include <iostream>
#include <sstream>
#include <stdexcept>

namespace dmlc {

struct Error : std::runtime_error { using std::runtime_error::runtime_error; };

// Its destructor throws the text that was streamed into it, so a failed check ends the call of forward with that text.
struct FatalMessage {
  std::ostringstream text_;
  FatalMessage(const char* file, int line) { text_ << file << ":" << line << ": "; }
  std::ostringstream& stream() { return text_; }
  ~FatalMessage() noexcept(false) { throw Error(text_.str()); }
};

struct LogMessage {
  LogMessage(const char* file, int line) { std::cerr << file << ":" << line << ": "; }
  std::ostream& stream() { return std::cerr; }
  ~LogMessage() { std::cerr << std::endl; }
};

// Seconds by a monotonic clock.
inline double GetTime() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace dmlc

#define ECE408_GRADE_FATAL_ ::dmlc::FatalMessage(__FILE__, __LINE__).stream()
#define LOG_INFO ::dmlc::LogMessage(__FILE__, __LINE__)
#define LOG_WARNING LOG_INFO
#define LOG_ERROR LOG_INFO
#define LOG_FATAL ::dmlc::FatalMessage(__FILE__, __LINE__)
#define LOG(severity) LOG_##severity.stream()
#define VLOG(level) LOG(INFO)
#define DLOG(severity) while (false) LOG(severity)

#define CHECK(x) \
  if (!(x)) ECE408_GRADE_FATAL_ << "Check failed: " #x << ": "
#define ECE408_GRADE_CHECK_(x, y, op) \
  if (!((x)op(y))) ECE408_GRADE_FATAL_ << "Check failed: " #x " " #op " " #y << " (" << (x) << " vs. " << (y) << ") "
#define CHECK_EQ(x, y) ECE408_GRADE_CHECK_(x, y, ==)
#define CHECK_NE(x, y) ECE408_GRADE_CHECK_(x, y, !=)
#define CHECK_LT(x, y) ECE408_GRADE_CHECK_(x, y, <)
#define CHECK_LE(x, y) ECE408_GRADE_CHECK_(x, y, <=)
#define CHECK_GT(x, y) ECE408_GRADE_CHECK_(x, y, >)
#define CHECK_GE(x, y) ECE408_GRADE_CHECK_(x, y, >=)
#define DCHECK CHECK
#define DCHECK_EQ CHECK_EQ
