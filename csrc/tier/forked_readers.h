#pragma once

#include <cstdint>
#include <vector>

namespace reef {

/// The forked processes that may still read what this one had written when they were forked. Each holds the
/// end of a pipe, which the kernel closes when it ends or becomes another program. Not thread-safe.
class ForkedReaders {
 public:
  ForkedReaders() = default;
  ~ForkedReaders();
  ForkedReaders(const ForkedReaders&) = delete;
  ForkedReaders& operator=(const ForkedReaders&) = delete;

  /// So far. What is written now is known to later ones only.
  std::uint64_t forks() const { return forks_; }
  /// Whether a process is alive that was forked after so many forks. Cost: a system call for each that was
  /// alive when last asked.
  bool may_read(std::uint64_t forks);

  void before_fork() noexcept;
  void after_fork_in_parent() noexcept;
  void after_fork_in_child() noexcept;

 private:
  struct Reader {
    std::uint64_t fork;
    int pipe;  ///< at its end when the process has gone; -1: nobody can tell
  };

  std::uint64_t forks_ = 0;
  std::vector<Reader> alive_;
  int ends_[2] = {-1, -1};  ///< of the next child's pipe: ours, its
};

}  // namespace reef
