#include "shard/qsgd_exchange.h"

#include "kernels/packed_levels.h"
#include "kernels/random_key.h"
#include "shard/entropy_coded_messages.h"
#include "shard/packed_code.h"

namespace reef {
namespace {

using at::Tensor;

constexpr double kBits = 8;

}  // namespace

QsgdExchange::QsgdExchange(const ProcessGroupPtr& group, int number, int slices, const ShardOptions& options)
    : CodedExchange(group, number, slices, options, {"qsgd", {}, {kSteps}}),
      bits_(options.compression_options.bits),
      seed_(static_cast<std::uint64_t>(options.compression_options.seed.at(0, 0))),
      entropy_coded_(options.compression_options.entropy_coded.at(0, 0) != 0) {}

int QsgdExchange::bits() const { return static_cast<int>(bits_.at(used_steps(), kBits)); }

Tensor QsgdExchange::encode(const Part& part) {
  const std::int64_t elements = part.values.numel() / part.slices;
  Tensor codes = empty_codes(part.slices, elements, bits());
  const auto step = static_cast<std::uint64_t>(used_steps());
  const auto rank = static_cast<std::uint64_t>(ranks().all().place);
  for (int number = 0; number < part.slices; ++number) {
    const std::uint64_t key = kernels::random_key(
        {seed_, step, rank, part.bucket.number, part.of_sum ? 1U : 0U, static_cast<std::uint64_t>(number)});
    kernels::encode_levels(part.values.const_data_ptr<float>() + number * elements, elements, bits(), key,
                           code_of_slice(codes, number, part.slices));
  }
  return codes;
}

void QsgdExchange::decode(const Tensor& codes, int count, int divisor, const Tensor& to) const {
  sum_of_codes(codes, count, bits(), to);
  if (divisor != 1) to.div_(divisor);
}

bool QsgdExchange::any_nonfinite(const Tensor& codes) const { return any_nonfinite_block(codes, bits()); }

void QsgdExchange::all_to_all(const char* name, const Tensor& codes, const Tensor& received,
                              const RanksAmong& among) {
  if (!entropy_coded_) return CodedExchange::all_to_all(name, codes, received, among);
  all_to_all_entropy_coded(ranks(), name, codes, received, among, bits());
}

void QsgdExchange::all_gather(const char* name, const Tensor& codes, const RanksAmong& among) {
  if (!entropy_coded_) return CodedExchange::all_gather(name, codes, among);
  all_gather_entropy_coded(ranks(), name, codes, among, bits());
}

}  // namespace reef
