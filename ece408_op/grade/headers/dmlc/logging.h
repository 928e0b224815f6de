// A stand-in for dmlc-core's checks and log lines: CHECK(x), CHECK_EQ(a, b), LOG(INFO), each taking << text.
#ifndef ECE408_GRADE_DMLC_LOGGING_H_
#define ECE408_GRADE_DMLC_LOGGING_H_

#include <cstdlib>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>

namespace dmlc {

struct Error : public std::runtime_error {
  explicit Error(const std::string& text) : std::runtime_error(text) {}
};

// Its destructor throws what was streamed into it: a failed check ends the call of forward with that text.
class FatalMessage {
 public:
  FatalMessage(const char* file, int line) { text_ << file << ":" << line << ": "; }
  std::ostringstream& stream() { return text_; }
  ~FatalMessage() noexcept(false) { throw Error(text_.str()); }

 private:
  std::ostringstream text_;
};

class LogMessage {
 public:
  LogMessage(const char* file, int line) { text_ << file << ":" << line << ": "; }
  std::ostringstream& stream() { return text_; }
  ~LogMessage() { std::cerr << text_.str() << std::endl; }

 private:
  std::ostringstream text_;
};

// Makes "condition ? nothing : stream" one expression of type void.
struct Voidify {
  void operator&(std::ostream&) {}
};

}  // namespace dmlc

#define ECE408_GRADE_FATAL_ ::dmlc::FatalMessage(__FILE__, __LINE__).stream()
#define LOG_INFO ::dmlc::LogMessage(__FILE__, __LINE__)
#define LOG_WARNING LOG_INFO
#define LOG_ERROR LOG_INFO
#define LOG_FATAL ::dmlc::FatalMessage(__FILE__, __LINE__)
#define LOG(severity) LOG_##severity.stream()
#define LOG_DEBUG LOG_INFO
#define LOG_DFATAL LOG_FATAL
#define LG LOG_INFO.stream()
#define VLOG(level) LOG_INFO.stream()
#define LOG_IF(severity, condition) !(condition) ? (void)0 : ::dmlc::Voidify() & LOG(severity)

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
#define DLOG(severity) LOG_IF(severity, false)
#define DLOG_IF(severity, condition) LOG_IF(severity, false && (condition))
#define CHECK_NOTNULL(x) (x)
#define DCHECK(x) CHECK(x)
#define DCHECK_EQ(x, y) CHECK_EQ(x, y)
#define DCHECK_NE(x, y) CHECK_NE(x, y)
#define DCHECK_LT(x, y) CHECK_LT(x, y)
#define DCHECK_LE(x, y) CHECK_LE(x, y)
#define DCHECK_GT(x, y) CHECK_GT(x, y)
#define DCHECK_GE(x, y) CHECK_GE(x, y)

#endif  // ECE408_GRADE_DMLC_LOGGING_H_
