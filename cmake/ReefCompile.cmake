# How our own targets are compiled. Nothing here reaches a consumer.

# reef_compile(target): C++20, hidden visibility, warnings as errors, and sanitizers on request.
function(reef_compile target)
  target_compile_features(${target} PUBLIC cxx_std_20)
  set_target_properties(
    ${target}
    PROPERTIES CXX_VISIBILITY_PRESET hidden
               CUDA_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON
               POSITION_INDEPENDENT_CODE ON
               CXX_EXTENSIONS OFF
               DEFINE_SYMBOL "") # of no use here, and a precompiled header must not differ in it
  target_compile_options(
    ${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wnon-virtual-dtor;-Werror>
                      # GCC 12 and 13 see overlaps in std::string that are not there (PR 105651).
                      $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-restrict>
                      $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
  if(REEF_SANITIZE)
    # vptr: libtorch is built without the type information it wants.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined;-fno-sanitize=vptr;
                                             -fno-sanitize-recover=all;-fno-omit-frame-pointer>)
    target_link_options(${target} PRIVATE -fsanitize=address,undefined -fno-sanitize=vptr)
  endif()
endfunction()

# reef_unit(target name source...): sources of a target that are compiled together as one translation unit, unless
# REEF_UNITY is off. LibTorch's headers cost more than most of our sources, and what they instantiate is paid for in every
# translation unit, precompiled or not. Keep a unit below 30 s: that is what a change in one of its sources costs.
function(reef_unit target name)
  target_sources(${target} PRIVATE ${ARGN})
  set_source_files_properties(${ARGN} PROPERTIES UNITY_GROUP ${name})
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${REEF_UNITY} UNITY_BUILD_MODE GROUP)
endfunction()

# reef_program(target source...): an executable of ours against the library, found from the build tree as it is.
function(reef_program target)
  add_executable(${target} ${ARGN})
  target_link_libraries(${target} PRIVATE reef)
  reef_compile(${target})
endfunction()

# reef_test_program(target source...): a program in which not speed but its compilation counts: hardly optimized, with
# torch/torch.h and GoogleTest precompiled once for all of them (reef_precompiled, which exists to own the header).
function(reef_test_program target)
  reef_program(${target} ${ARGN})
  target_link_libraries(${target} PRIVATE GTest::gtest)
  if(NOT REEF_SANITIZE)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O1>)
  endif()
  if(target STREQUAL reef_precompiled)
    target_precompile_headers(${target} PRIVATE "${PROJECT_SOURCE_DIR}/tests/support/precompiled.h")
  else()
    target_precompile_headers(${target} REUSE_FROM reef_precompiled)
  endif()
endfunction()

# reef_build_facts(source cuda): what build_info() reports, as definitions of that one source. cuda: the toolkit's version, or "".
function(reef_build_facts source cuda)
  execute_process(
    COMMAND git -C "${PROJECT_SOURCE_DIR}" rev-parse --short=12 HEAD
    OUTPUT_VARIABLE _commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  set_source_files_properties(
    ${source}
    PROPERTIES
      COMPILE_DEFINITIONS
      "REEF_VERSION=\"${PROJECT_VERSION}\";REEF_GIT_COMMIT=\"${_commit}\";REEF_BUILT_TORCH=\"${REEF_TORCH_VERSION}\";REEF_BUILT_CUDA=\"${cuda}\";REEF_CUDA_ARCHS=\"${REEF_CUDA_ARCHS}\";REEF_COMPILER=\"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\""
  )
endfunction()
