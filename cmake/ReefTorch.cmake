# Finds LibTorch in a torch wheel (or any prefix laid out like one) and defines the targets Reef is built on:
#   reef::torch        headers, c10, torch_cpu; with REEF_WITH_CUDA also c10_cuda, torch_cuda and cudart
#   reef::torch_cuda   with REEF_WITH_CUDA: what a source needs that talks to CUDA or NCCL itself (the toolkit's headers,
#                      nccl.h, USE_C10D_NCCL)
# Sets REEF_TORCH_VERSION (major.minor.patch) and REEF_TORCH_ROOT.
#
# torch's own package is not used: for a CUDA wheel it demands the CUDA Toolkit even of a CPU-only program, ignores
# CMAKE_CUDA_ARCHITECTURES and sets global flags. Its two facts that matter are the include folders and the libraries.
#
# Input, the first that is set wins:
#   Torch_ROOT    the torch folder itself (it holds include/ and lib/)
#   REEF_PYTHON   an interpreter that can import torch
#   python3       on PATH
# This file is installed beside ReefConfig.cmake, so a consumer finds torch exactly as Reef's own build does.
include_guard(GLOBAL)

set(REEF_TORCH_ROOT "${Torch_ROOT}")
if(NOT REEF_TORCH_ROOT AND DEFINED ENV{Torch_ROOT})
  set(REEF_TORCH_ROOT "$ENV{Torch_ROOT}")
endif()
if(NOT REEF_TORCH_ROOT)
  set(_reef_python "${REEF_PYTHON}")
  if(NOT _reef_python)
    set(_reef_python python3)
  endif()
  set(_reef_find "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")
  # Second try without PYTHONPATH: pip's isolated builds use it to hide the packages of the interpreter they install for.
  foreach(_reef_env "" --unset=PYTHONPATH)
    execute_process(
      COMMAND ${CMAKE_COMMAND} -E env ${_reef_env} "${_reef_python}" -c "${_reef_find}"
      OUTPUT_VARIABLE REEF_TORCH_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _reef_result)
    if(_reef_result EQUAL 0)
      break()
    endif()
  endforeach()
  if(NOT _reef_result EQUAL 0)
    message(FATAL_ERROR "Reef: ${_reef_python} cannot import torch. Set REEF_PYTHON to an interpreter that can, or "
                        "Torch_ROOT to the torch folder (the one with include/ and lib/).")
  endif()
endif()
if(NOT EXISTS "${REEF_TORCH_ROOT}/include/torch/headeronly/version.h")
  message(FATAL_ERROR "Reef: ${REEF_TORCH_ROOT} is not a LibTorch folder: it has no include/torch/headeronly/version.h.")
endif()

file(STRINGS "${REEF_TORCH_ROOT}/include/torch/headeronly/version.h" _reef_lines
     REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+).*" "\\1.\\2.\\3" REEF_TORCH_VERSION
                     "${_reef_lines}")
if(REEF_TORCH_VERSION VERSION_LESS 2.11 OR REEF_TORCH_VERSION VERSION_GREATER_EQUAL 2.16)
  message(FATAL_ERROR "Reef: ${REEF_TORCH_ROOT} is torch ${REEF_TORCH_VERSION}; 2.11 to 2.15 are supported.")
endif()

add_library(reef_torch INTERFACE)
add_library(reef::torch ALIAS reef_torch)
target_include_directories(reef_torch SYSTEM INTERFACE "${REEF_TORCH_ROOT}/include"
                                                       "${REEF_TORCH_ROOT}/include/torch/csrc/api/include")
# NDEBUG: at::RecordFunction has a member under #ifndef NDEBUG, so a translation unit without it disagrees with the
# release wheel about the size of the object.
target_compile_definitions(reef_torch INTERFACE NDEBUG USE_DISTRIBUTED USE_C10D_GLOO USE_RPC)
target_link_libraries(reef_torch INTERFACE "${REEF_TORCH_ROOT}/lib/libtorch_cpu.so" "${REEF_TORCH_ROOT}/lib/libc10.so")

# The wheel keeps the CUDA libraries in sibling packages. libtorch_cpu of a CUDA wheel needs some of them to load, so
# even a CPU-only link must be told where they are (-rpath-link: for the linker only, the wheel finds them by itself).
file(GLOB _reef_wheel_libraries "${REEF_TORCH_ROOT}/../nvidia/*/lib")
foreach(_reef_folder IN LISTS _reef_wheel_libraries)
  cmake_path(NORMAL_PATH _reef_folder)
  target_link_options(reef_torch INTERFACE "LINKER:-rpath-link,${_reef_folder}")
endforeach()

if(REEF_WITH_CUDA)
  if(NOT EXISTS "${REEF_TORCH_ROOT}/lib/libtorch_cuda.so")
    message(FATAL_ERROR "Reef: REEF_WITH_CUDA is on, but ${REEF_TORCH_ROOT} is a CPU build of torch.")
  endif()
  find_package(CUDAToolkit 13 REQUIRED)
  # A target of its own: all other sources are compiled by the same command with and without CUDA, once for both.
  add_library(reef_torch_cuda INTERFACE)
  add_library(reef::torch_cuda ALIAS reef_torch_cuda)
  # The wheel's nccl.h, not the toolkit's: ncclConfig_t grew between the two, and with it ProcessGroupNCCL::Options.
  target_include_directories(reef_torch_cuda SYSTEM INTERFACE "${REEF_TORCH_ROOT}/../nvidia/nccl/include"
                                                              ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_definitions(reef_torch_cuda INTERFACE USE_C10D_NCCL)
  target_link_libraries(reef_torch_cuda INTERFACE reef_torch)
  file(GLOB _reef_cudart "${REEF_TORCH_ROOT}/../nvidia/cu*/lib/libcudart.so.*")
  if(NOT _reef_cudart)
    set(_reef_cudart CUDA::cudart)
  endif()
  target_link_libraries(reef_torch INTERFACE "${REEF_TORCH_ROOT}/lib/libtorch_cuda.so"
                                             "${REEF_TORCH_ROOT}/lib/libc10_cuda.so" ${_reef_cudart})
endif()
