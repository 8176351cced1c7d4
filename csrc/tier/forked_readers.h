#pragma once

#include <cstdint>
#include <vector>

namespace reef {

/// Knows which forked processes may still read what this process had written to a file when they were forked.
/// Each child holds the end of a pipe, which the kernel closes when the child ends or becomes another
/// program. Not thread-safe.
class ForkedReaders {
 public:
  ForkedReaders() = default;
  ~ForkedReaders();
  ForkedReaders(const ForkedReaders&) = delete;
  ForkedReaders& operator=(const ForkedReaders&) = delete;

  /// The number of forks so far. What is written now is known to later children only.
  std::uint64_t forks() const { return forks_; }
  /// Whether a child is alive that was forked when forks() was larger than `forks`. Costs a system call for
  /// each child that was alive at the last call.
  bool may_read(std::uint64_t forks);

  void before_fork() noexcept;
  void after_fork_in_parent() noexcept;
  void after_fork_in_child() noexcept;

 private:
  struct Reader {
    std::uint64_t fork;
    int pipe;  ///< reads end of file once the process has gone; -1: it cannot be known
  };

  std::uint64_t forks_ = 0;
  std::vector<Reader> alive_;
  int ends_[2] = {-1, -1};  ///< of the pipe of the child that is being forked: the parent's, the child's
};

}  // namespace reef
