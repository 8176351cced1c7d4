#pragma once

// What every benchmark here shares: variants measured in turn within one run, medians and spread, JSON lines
// out. Machines drift by tens of per cent in an hour, so what is compared is measured in alternating rounds.

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace reef::bench {

/// From here on the process keeps the pages of what it frees, as with the allocators that people train with.
/// glibc's gives those of large tensors back, and then what holds more at once pays for more page faults.
inline void keep_pages() {
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, -1);
}

struct Variant {
  std::string name;
  std::function<void()> prepare;  ///< untimed, before each round; may be empty
  std::function<void()> run;      ///< `work` units of work
  std::function<void()> finish;   ///< untimed, after each round; may be empty
};

inline double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<std::size_t>(std::lround(q * static_cast<double>(values.size() - 1)))];
}
inline double median(std::vector<double> values) { return quantile(std::move(values), 0.5); }

struct Result {
  std::string name;
  std::vector<double> nanoseconds;  ///< per unit of work, one entry a round

  double quantile(double q) const { return bench::quantile(nanoseconds, q); }
  double median() const { return quantile(0.5); }
};

/// Runs the variants in turn, `rounds` times after one warm-up, `work` units in each run.
inline std::vector<Result> in_turn(const std::vector<Variant>& variants, int rounds, double work) {
  std::vector<Result> results;
  for (const Variant& variant : variants) results.push_back({variant.name, {}});
  for (int round = -1; round < rounds; ++round) {
    for (std::size_t i = 0; i < variants.size(); ++i) {
      const Variant& variant = variants[i];
      if (variant.prepare) variant.prepare();
      const auto begin = std::chrono::steady_clock::now();
      variant.run();
      const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - begin;
      if (variant.finish) variant.finish();
      if (round >= 0) results[i].nanoseconds.push_back(taken.count() / work);
    }
  }
  return results;
}

/// One JSON line. Names and contexts here are plain ASCII without quotes.
inline void print(const std::string& name, double value, const std::string& unit,
                  const std::string& context) {
  std::printf(R"({"name": "%s", "value": %.6g, "unit": "%s", "context": "%s"})"
              "\n",
              name.c_str(), value, unit.c_str(), context.c_str());
  std::fflush(stdout);
}

/// A point of a chart, as a JSON line.
inline void print_point(const std::string& chart, const std::string& series, const std::string& x_name,
                        double x, const std::string& y_name, double y) {
  std::printf(R"({"chart": "%s", "series": "%s", "x_name": "%s", "x": %.6g, "y_name": "%s", "y": %.6g})"
              "\n",
              chart.c_str(), series.c_str(), x_name.c_str(), x, y_name.c_str(), y);
}

/// Medians of all, with their spread, and each one's difference from the first.
inline void print(const std::string& name, const std::vector<Result>& results, const std::string& unit) {
  for (const Result& result : results) {
    char spread[96];
    std::snprintf(spread, sizeof spread, "median of %zu rounds, quartiles %.4g to %.4g",
                  result.nanoseconds.size(), result.quantile(0.25), result.quantile(0.75));
    print(name + "/" + result.name, result.median(), unit, spread);
  }
  for (std::size_t i = 1; i < results.size(); ++i) {
    std::vector<double> differences;
    for (std::size_t round = 0; round < results[i].nanoseconds.size(); ++round) {
      differences.push_back(results[i].nanoseconds[round] - results[0].nanoseconds[round]);
    }
    const Result difference{"", differences};
    print(name + "/" + results[i].name + " added", difference.median(), unit,
          "median of differences to " + results[0].name + " in the same round");
  }
}

/// Each one's time over the first's, in the same round.
inline void print_ratios(const std::string& name, const std::vector<Result>& results) {
  for (std::size_t i = 1; i < results.size(); ++i) {
    std::vector<double> ratios;
    for (std::size_t round = 0; round < results[i].nanoseconds.size(); ++round)
      ratios.push_back(results[i].nanoseconds[round] / results[0].nanoseconds[round]);
    char spread[96];
    std::snprintf(spread, sizeof spread, "median of ratios in the same round, quartiles %.4g to %.4g",
                  quantile(ratios, 0.25), quantile(ratios, 0.75));
    print(name + "/" + results[i].name + " over " + results[0].name, median(ratios), "x", spread);
  }
}

inline void print_with_ratios(const std::string& name, const std::vector<Result>& results,
                              const std::string& unit) {
  print(name, results, unit);
  print_ratios(name, results);
}

}  // namespace reef::bench
