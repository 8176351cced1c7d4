#pragma once

#include <cstdint>

namespace reef::kernels {

/// Makes these rows of `length` elements orthonormal: Gram-Schmidt, modified and done twice, with sums in
/// double that are the same on every machine. A row of zeros stays one; of a row that those before it make up
/// there is what rounding leaves; one that is not finite becomes NaN, and so do those behind it.
void orthonormalize(float* rows, std::int64_t count, std::int64_t length);

/// A matrix (rows x columns) becomes left^T right, of `rank` (left: rank x rows, right: rank x columns), and
/// `rest` what the matrix had beyond that over `divisor`; where that is not finite, 0. All are float32 and
/// without gaps. Added up in the order of ranks: the same bits on every machine.
void take_low_rank(float* matrix, float* rest, const float* left, const float* right, std::int64_t rows,
                   std::int64_t columns, std::int64_t rank, int divisor);

}  // namespace reef::kernels
