#include "reef/link.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>
#include <utility>

#include "reef/error.h"

namespace reef {
namespace {

// Of one latency, one message, one byte: what a sample has of each, over its seconds, gives 1.
constexpr std::size_t kUnknowns = 3;
using Seconds = std::array<double, kUnknowns>;

Seconds shares_of(const LinkSample& sample) {
  return {sample.rounds / sample.seconds, sample.messages / sample.seconds, sample.bytes / sample.seconds};
}

double predicted(const Seconds& each, const LinkSample& sample) {
  return each[0] * sample.rounds + each[1] * sample.messages + each[2] * sample.bytes;
}

// Sum of the squares of relative errors.
double error_of(const Seconds& each, const std::vector<LinkSample>& samples) {
  double sum = 0;
  for (const LinkSample& sample : samples) {
    const double error = predicted(each, sample) / sample.seconds - 1;
    sum += error * error;
  }
  return sum;
}

// The least squares with the others 0, by Gaussian elimination of the normal equations of columns of length
// 1. Nothing, where the samples do not tell.
std::optional<Seconds> least_squares(const std::vector<LinkSample>& samples,
                                     const std::vector<std::size_t>& unknowns) {
  const std::size_t count = unknowns.size();
  Seconds length{};
  for (const LinkSample& sample : samples) {
    const Seconds shares = shares_of(sample);
    for (std::size_t i = 0; i < kUnknowns; ++i) length[i] += shares[i] * shares[i];
  }
  for (double& each : length) each = std::sqrt(each);
  std::array<std::array<double, kUnknowns + 1>, kUnknowns> rows{};
  for (const LinkSample& sample : samples) {
    const Seconds shares = shares_of(sample);
    for (std::size_t i = 0; i < count; ++i) {
      const double of_row = shares[unknowns[i]] / length[unknowns[i]];
      for (std::size_t k = 0; k < count; ++k)
        rows[i][k] += of_row * shares[unknowns[k]] / length[unknowns[k]];
      rows[i][count] += of_row;
    }
  }
  for (std::size_t column = 0; column < count; ++column) {
    std::size_t pivot = column;
    for (std::size_t i = column; i < count; ++i) {
      if (std::abs(rows[i][column]) > std::abs(rows[pivot][column])) pivot = i;
    }
    if (!(std::abs(rows[pivot][column]) > 1e-9)) return std::nullopt;
    std::swap(rows[column], rows[pivot]);
    for (std::size_t i = 0; i < count; ++i) {
      if (i == column) continue;
      const double factor = rows[i][column] / rows[column][column];
      for (std::size_t k = column; k <= count; ++k) rows[i][k] -= factor * rows[column][k];
    }
  }
  Seconds found{};
  for (std::size_t i = 0; i < count; ++i)
    found[unknowns[i]] = rows[i][count] / rows[i][i] / length[unknowns[i]];
  return found;
}

void check_samples(const char* call, const std::vector<LinkSample>& samples) {
  for (const LinkSample& sample : samples) {
    if (sample.seconds > 0 && sample.rounds > 0 && sample.messages > 0 && sample.bytes > 0 &&
        std::isfinite(sample.rounds + sample.messages + sample.bytes + sample.seconds))
      continue;
    throw ConfigError(std::string(call) +
                      " was given a sample that is not positive in all it has: leave it out.");
  }
}

LinkFit fit_of(const Seconds& each, std::vector<LinkSample> samples) {
  LinkFit fit{{each[0], 1 / each[2], each[1]}, 0, std::move(samples)};
  for (const LinkSample& sample : fit.samples)
    fit.worst_error = std::max(fit.worst_error, std::abs(predicted(each, sample) / sample.seconds - 1));
  return fit;
}

std::string text_of(const char* format, double value) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), format, value);
  return text.data();
}

}  // namespace

std::string link_text(const Link& link) {
  return text_of("%.3f ms of latency, ", link.latency_seconds * 1e3) +
         text_of("%.3f ms a message, ", link.message_seconds * 1e3) +
         text_of("%.1f MB/s", link.bytes_per_second / 1e6);
}

void check_link(const Link& link) {
  const auto is_time = [](double seconds) { return std::isfinite(seconds) && seconds >= 0; };
  if (is_time(link.latency_seconds) && is_time(link.message_seconds) &&
      std::isfinite(link.bytes_per_second) && link.bytes_per_second > 0)
    return;
  throw ConfigError("a link was given of " + link_text(link) +
                    ": give a latency and a time for each message of 0 seconds or more, and more than 0 "
                    "bytes per second.");
}

std::string LinkFit::text() const {
  return link_text(link) + text_of(", within %.0f", worst_error * 100) + " % of " +
         std::to_string(samples.size()) + " measurements";
}

LinkFit fit_link(std::vector<LinkSample> samples) {
  check_samples("fit_link", samples);
  struct Found {
    Seconds each{};
    double error = std::numeric_limits<double>::infinity();
  };
  // Of those none of whose numbers is negative.
  const auto best_of = [&](const std::vector<std::vector<std::size_t>>& choices) {
    Found best;
    for (const std::vector<std::size_t>& unknowns : choices) {
      const std::optional<Seconds> found = least_squares(samples, unknowns);
      if (!found || *std::min_element(found->begin(), found->end()) < 0) continue;
      if (const double error = error_of(*found, samples); error < best.error) best = {*found, error};
    }
    return best;
  };
  const Found best = best_of({{2}, {0, 2}, {1, 2}, {0, 1, 2}});
  if (!(best.each[2] > 0) || !(best.error < best_of({{0}, {1}, {0, 1}}).error)) {
    throw ConfigError("fit_link was given " + std::to_string(samples.size()) +
                      " samples that do not tell a bandwidth: measure messages of several sizes, of which "
                      "the largest take longer than the smallest.");
  }
  return fit_of(best.each, std::move(samples));
}

LinkFit bound_link(std::vector<LinkSample> samples) {
  check_samples("bound_link", samples);
  if (samples.empty()) throw ConfigError("bound_link was given no samples: measure messages.");
  Seconds each{std::numeric_limits<double>::infinity(), 0, std::numeric_limits<double>::infinity()};
  for (const LinkSample& sample : samples) {
    each[0] = std::min(each[0], sample.seconds / sample.rounds);
    each[2] = std::min(each[2], sample.seconds / sample.bytes);
  }
  return fit_of(each, std::move(samples));
}

}  // namespace reef
