#include "shard/sign_exchange.h"

#include "kernels/packed_levels.h"
#include "shard/packed_code.h"

namespace reef {

using at::Tensor;

Tensor SignExchange::encode(const Part& part) {
  const std::int64_t elements = part.values.numel() / part.slices;
  Tensor codes = empty_codes(part.slices, elements, /*bits=*/1);
  for (int number = 0; number < part.slices; ++number) {
    kernels::encode_signs(part.values.mutable_data_ptr<float>() + number * elements, elements,
                          code_of_slice(codes, number, part.slices));
  }
  clear_between_parameters(part.bucket, part.first, part.values);  // a sign is never zero
  return codes;
}

void SignExchange::decode(const Tensor& codes, int count, int divisor, const Tensor& to) const {
  sum_of_codes(codes, count, /*bits=*/1, to);
  if (divisor != 1) to.div_(divisor);
}

bool SignExchange::any_nonfinite(const Tensor& codes) const { return any_nonfinite_block(codes, /*bits=*/1); }

}  // namespace reef
