#pragma once

#include <string>
#include <string_view>

namespace bytelm {

/// The bytes of the file at `path`. Throws reef::FileError, whose sentence ends with `advice`.
std::string read_whole_file(const std::string& path, const std::string& advice);

/// Writes `content` to `path` so that, whatever happens, the path names either the whole new file or what it
/// named before: through a temporary file beside it, flushed to disk and renamed. Throws reef::FileError.
void write_whole_file(const std::string& path, std::string_view content);

/// Throws reef::FileError if no file can be made at `path`, so that a long run does not find out at its end.
void require_writable(const std::string& path);

}  // namespace bytelm
