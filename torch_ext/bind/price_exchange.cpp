#include "reef/price_exchange.h"

#include <torch/library.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <vector>

#include "compression_options.h"
#include "reef/error.h"
#include "reef/measure_exchange_work.h"

namespace {

using Shapes = std::vector<std::vector<std::int64_t>>;

/// So many of them are each bucket's.
std::vector<Shapes> divided_among(const Shapes& shapes, const std::vector<std::int64_t>& counts) {
  std::vector<Shapes> buckets;
  auto next = shapes.begin();
  for (const std::int64_t count : counts) {
    if (count < 0 || count > shapes.end() - next)
      throw reef::ConfigError("price_exchange was given shapes for fewer parameters than buckets have");
    buckets.emplace_back(next, next + count);
    next += count;
  }
  return buckets;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def(
      "price_exchange(float latency_seconds, float bytes_per_second, float message_seconds, int[] buckets, "
      "int ranks, bool divided, str[] compression_options, int[] option_steps, float[] option_values, "
      "int[][] shapes, int[] shapes_of_buckets, float[] work) -> (str, str)",
      [](double latency_seconds, double bytes_per_second, double message_seconds,
         const std::vector<std::int64_t>& buckets, std::int64_t ranks, bool divided,
         const std::vector<std::string>& option_names, const std::vector<std::int64_t>& option_steps,
         const std::vector<double>& option_values, const std::vector<std::vector<std::int64_t>>& shapes,
         const std::vector<std::int64_t>& shapes_of_buckets, const std::vector<double>& work) {
        reef::ExchangeWork of_work;
        if (work.size() != reef::kExchangeWorkMembers.size())
          throw reef::ConfigError("price_exchange takes " +
                                  std::to_string(reef::kExchangeWorkMembers.size()) + " numbers of work");
        for (std::size_t i = 0; i < work.size(); ++i) of_work.*reef::kExchangeWorkMembers[i] = work[i];
        if (ranks != static_cast<int>(ranks))
          throw reef::ConfigError("price_exchange was given " + std::to_string(ranks) + " ranks");
        const reef::ExchangePrices prices =
            reef::price_exchange({latency_seconds, bytes_per_second, message_seconds}, buckets,
                                 {.ranks = static_cast<int>(ranks),
                                  .divided = divided,
                                  .compression_options = reef::bind::compression_options(
                                      option_names, option_steps, option_values),
                                  .shapes = divided_among(shapes, shapes_of_buckets),
                                  .work = of_work});
        return std::make_tuple(prices.json(), prices.table());
      });
  m.def(
      "measure_exchange_work(__torch__.torch.classes.c10d.ProcessGroup group, float density, "
      "int elements) -> float[]",
      [](const reef::ProcessGroupPtr& group, double density, std::int64_t elements) {
        const reef::ExchangeWork work = reef::measure_exchange_work(group, density, elements);
        std::vector<double> numbers;
        for (const auto member : reef::kExchangeWorkMembers) numbers.push_back(work.*member);
        return numbers;
      });
}
