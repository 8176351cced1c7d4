#include "reef/price_exchange.h"

#include <torch/library.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <vector>

#include "compression_options.h"
#include "reef/error.h"
#include "reef/measure_exchange_work.h"

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def(
      "price_exchange(float latency_seconds, float bytes_per_second, float message_seconds, int[] buckets, "
      "int ranks, bool divided, str[] compression_options, int[] option_steps, float[] option_values, "
      "float[] work) -> (str, str)",
      [](double latency_seconds, double bytes_per_second, double message_seconds,
         const std::vector<std::int64_t>& buckets, std::int64_t ranks, bool divided,
         const std::vector<std::string>& option_names, const std::vector<std::int64_t>& option_steps,
         const std::vector<double>& option_values, const std::vector<double>& work) {
        if (work.size() != 4) throw reef::ConfigError("price_exchange takes 4 numbers of work");
        if (ranks != static_cast<int>(ranks))
          throw reef::ConfigError("price_exchange was given " + std::to_string(ranks) + " ranks");
        const reef::ExchangePrices prices = reef::price_exchange(
            {latency_seconds, bytes_per_second, message_seconds}, buckets,
            {.ranks = static_cast<int>(ranks),
             .divided = divided,
             .compression_options =
                 reef::bind::compression_options(option_names, option_steps, option_values),
             .work = {.add = work[0], .round = work[1], .select = work[2], .merge = work[3]}});
        return std::make_tuple(prices.json(), prices.table());
      });
  m.def("measure_exchange_work(__torch__.torch.classes.c10d.ProcessGroup group, float density) -> float[]",
        [](const reef::ProcessGroupPtr& group, double density) {
          const reef::ExchangeWork work = reef::measure_exchange_work(group, density);
          return std::vector<double>{work.add, work.round, work.select, work.merge};
        });
}
