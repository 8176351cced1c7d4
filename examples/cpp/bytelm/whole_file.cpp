#include "whole_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "reef/error.h"

namespace bytelm {
namespace {

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

File open_file(const std::string& path, const char* mode) {
  return {std::fopen(path.c_str(), mode), &std::fclose};
}

[[noreturn]] void cannot_write(const std::string& path, int error_number) {
  throw reef::FileError("cannot write " + path + ": " + std::strerror(error_number) +
                            "; choose a folder that exists, may be written and has room",
                        path, error_number);
}

std::string folder_of(const std::string& path) {
  const auto folder = std::filesystem::path(path).parent_path();
  return folder.empty() ? "." : folder.native();
}

/// 0, or the error's number.
int write_and_flush(const std::string& path, std::string_view content) {
  const File file = open_file(path, "wb");
  const bool written = file && std::fwrite(content.data(), 1, content.size(), file.get()) == content.size() &&
                       std::fflush(file.get()) == 0 && ::fsync(::fileno(file.get())) == 0;
  return written ? 0 : errno;
}

/// The same for a folder's list of names.
int flush_folder(const std::string& path) {
  const int folder = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return errno;
  const int error_number = ::fsync(folder) == 0 ? 0 : errno;
  ::close(folder);
  return error_number;
}

}  // namespace

std::string read_whole_file(const std::string& path, const std::string& advice) {
  const File file = open_file(path, "rb");
  std::string content;
  char block[1 << 16];
  std::size_t count = 0;
  while (file && (count = std::fread(block, 1, sizeof block, file.get())) > 0) content.append(block, count);
  if (!file || std::ferror(file.get())) {
    const int error_number = errno;
    throw reef::FileError("cannot read " + path + ": " + std::strerror(error_number) + "; " + advice, path,
                          error_number);
  }
  return content;
}

void write_whole_file(const std::string& path, std::string_view content) {
  const std::string temporary = path + "." + std::to_string(::getpid()) + ".tmp";
  int error_number = write_and_flush(temporary, content);
  if (error_number == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) error_number = errno;
  if (error_number != 0) {
    ::unlink(temporary.c_str());
    cannot_write(path, error_number);
  }
  error_number = flush_folder(folder_of(path));  // the new name is on disk once its folder is
  if (error_number != 0) cannot_write(path, error_number);
}

void require_writable(const std::string& path) {
  if (std::filesystem::is_directory(path)) cannot_write(path, EISDIR);
  if (::access(folder_of(path).c_str(), W_OK | X_OK) != 0) cannot_write(path, errno);
}

}  // namespace bytelm
