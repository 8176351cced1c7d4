// Bytes behind which there is a page that nobody may read or write: who goes beyond their end is ended by
// SIGSEGV.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

namespace reef::test {

class GuardedBytes {
 public:
  explicit GuardedBytes(std::size_t bytes) : bytes_(bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t inside = (bytes + page - 1) / page * page;
    all_ = inside + page;
    map_ = mmap(nullptr, all_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map_ == MAP_FAILED) throw std::bad_alloc();
    auto* const first = static_cast<std::uint8_t*>(map_);
    if (mprotect(first + inside, page, PROT_NONE) != 0) throw std::bad_alloc();
    data_ = first + inside - bytes;
  }
  explicit GuardedBytes(const std::vector<std::uint8_t>& bytes) : GuardedBytes(bytes.size()) {
    if (!bytes.empty()) std::memcpy(data_, bytes.data(), bytes.size());
  }
  ~GuardedBytes() { munmap(map_, all_); }
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;

  std::uint8_t* data() const { return data_; }
  std::vector<std::uint8_t> copy() const { return {data_, data_ + bytes_}; }

 private:
  std::size_t bytes_, all_ = 0;
  void* map_ = nullptr;
  std::uint8_t* data_ = nullptr;
};

}  // namespace reef::test
