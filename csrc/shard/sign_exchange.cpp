#include "shard/sign_exchange.h"

#include <c10/util/accumulate.h>

#include <algorithm>

#include "kernels/packed_levels.h"
#include "shard/packed_code.h"

namespace reef {
namespace {

using at::Tensor;

// A sign is never zero, and what is between parameters is: nothing is held back there.
void clear_between_parameters(const GradientBucket& bucket, std::int64_t first, const Tensor& values) {
  const std::int64_t last = first + values.numel();
  std::int64_t begin = first;
  const auto clear_until = [&](std::int64_t end) {
    end = std::min(end, last);
    if (begin < end) values.narrow(0, begin - first, end - begin).zero_();
  };
  for (const GradientBucket::Place& place : bucket.places) {
    clear_until(place.offset);
    begin = std::max(begin, place.offset + c10::multiply_integers(place.shape));
  }
  clear_until(last);
}

}  // namespace

bool SignExchange::encodes(const Tensor& flat) const {
  return flat.is_cpu() && flat.scalar_type() == at::kFloat;
}

Tensor SignExchange::encode(const Part& part) {
  const std::int64_t elements = part.values.numel() / part.slices;
  Tensor codes = empty_codes(part.slices, elements, /*bits=*/1);
  for (int number = 0; number < part.slices; ++number) {
    kernels::encode_signs(part.values.mutable_data_ptr<float>() + number * elements, elements,
                          code_of_slice(codes, number, part.slices));
  }
  clear_between_parameters(part.bucket, part.first, part.values);
  return codes;
}

void SignExchange::decode(const Tensor& codes, int count, const Tensor& to) const {
  sum_of_codes(codes, count, /*bits=*/1, to);
}

}  // namespace reef
