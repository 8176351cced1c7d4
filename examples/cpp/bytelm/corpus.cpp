#include "corpus.h"

#include <ATen/TensorIndexing.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>
#include <utility>

#include "reef/bytes.h"
#include "reef/error.h"
#include "whole_file.h"

namespace bytelm {
namespace {

namespace fs = std::filesystem;

constexpr const char* kAdvice = "give --data files and folders that can be read";

std::string standard_library() {
  const std::string command =
      R"("${REEF_PYTHON:-python3}" -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])' 2>/dev/null)";
  std::string answer;
  std::FILE* pipe = popen(command.c_str(), "r");
  if (pipe) {
    for (int c = std::fgetc(pipe); c != EOF && c != '\n'; c = std::fgetc(pipe)) {
      answer += static_cast<char>(c);
    }
  }
  const bool succeeded = pipe && pclose(pipe) == 0;
  if (!succeeded || answer.empty()) {
    throw reef::ConfigError(
        "no Python was found whose standard library could be the text: set REEF_PYTHON to an interpreter, or "
        "give --data files and folders");
  }
  return answer;
}

/// Files below `folder` whose names end in `suffix`, sorted by the path from there.
std::vector<fs::path> files_below(const fs::path& folder, const std::string& suffix,
                                  const std::set<fs::path>& skipped_folders) {
  std::vector<std::string> names;
  try {
    for (auto entry = fs::recursive_directory_iterator(folder); entry != fs::end(entry); ++entry) {
      if (skipped_folders.count(entry->path().filename())) entry.disable_recursion_pending();
      if (entry->is_regular_file() && entry->path().native().ends_with(suffix)) {
        names.push_back(entry->path().lexically_relative(folder).native());
      }
    }
  } catch (const fs::filesystem_error& error) {
    throw reef::FileError(
        "cannot read " + error.path1().native() + ": " + error.code().message() + "; " + kAdvice,
        error.path1().native(), error.code().value());
  }
  std::sort(names.begin(), names.end());
  std::vector<fs::path> files;
  for (const auto& name : names) files.push_back(folder / name);
  return files;
}

std::vector<fs::path> corpus_files(const std::vector<std::string>& paths) {
  if (paths.empty()) {
    return files_below(standard_library(), ".py", {"__pycache__", "site-packages", "test", "tests"});
  }
  std::vector<fs::path> files;
  for (const fs::path path : paths) {
    if (fs::is_directory(path)) {
      const auto below = files_below(path, "", {});
      files.insert(files.end(), below.begin(), below.end());
    } else {
      files.push_back(path);
    }
  }
  return files;
}

// Over memory of the text's own, which is no part of what LibTorch allocates.
at::Tensor as_tensor(std::string text) {
  auto* kept = new std::string(std::move(text));
  return at::from_blob(
      kept->data(), {static_cast<std::int64_t>(kept->size())}, [kept](void*) { delete kept; }, at::kByte);
}

}  // namespace

Corpus load_corpus(const std::vector<std::string>& paths, std::int64_t window) {
  const auto files = corpus_files(paths);
  std::string training, validation, split;
  if (files.size() == 1) {
    training = read_whole_file(files[0], kAdvice);
    const std::size_t kept = training.size() - training.size() / 10;
    validation = training.substr(kept);
    training.resize(kept);
    split = "the last tenth of the single file";
  } else {
    for (std::size_t i = 0; i < files.size(); ++i) {
      const bool held_out = i % 10 == 9 || (files.size() < 10 && i + 1 == files.size());
      (held_out ? validation : training) += read_whole_file(files[i], kAdvice);
    }
    split = files.size() < 10 ? "the last file" : "every tenth file";
  }
  const std::size_t smaller = std::min(training.size(), validation.size());
  if (training.size() + validation.size() == 0) {
    throw reef::ConfigError("the text is empty: give --data files or folders that hold some");
  }
  if (smaller < static_cast<std::size_t>(window)) {
    throw reef::ConfigError("the text is too short: training has " + std::to_string(training.size()) +
                            " bytes and validation " + std::to_string(validation.size()) +
                            ", and each needs " + std::to_string(window) +
                            " (--context and one more): give more --data or a smaller --context");
  }
  const std::string description =
      std::to_string(files.size()) + (files.size() == 1 ? " file, " : " files, ") +
      reef::format_bytes(static_cast<std::int64_t>(training.size())) + " for training, " +
      reef::format_bytes(static_cast<std::int64_t>(validation.size())) + " for validation (" + split + ")";
  return {as_tensor(std::move(training)), as_tensor(std::move(validation)), description};
}

at::Tensor windows_at(const at::Tensor& text, const at::Tensor& offsets, std::int64_t window) {
  return text.unfold(0, window, 1).index({offsets}).to(at::kLong);
}

}  // namespace bytelm
