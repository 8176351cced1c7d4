#pragma once

#include <c10/core/Device.h>

#include "distributed/tensor_list_message.h"
#include "pipeline/course.h"
#include "pipeline_run/pass_tensors.h"

namespace reef {

/// Returns the part of what a pass has made that a delivery contains; nothing if the pass has made nothing
/// because its lane has ended.
TensorListMessage packed(const PipelineCourse::Delivery& delivery, const PassTensors& made);
/// Adds what a delivery brings to a chunk on this device.
void unpack(const PipelineCourse::Delivery& delivery, TensorListMessage content, c10::Device device,
            PassTensors& to);

}  // namespace reef
