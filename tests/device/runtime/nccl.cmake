# Builds played NCCL (nccl.cpp). It is preloaded after the played CUDA runtime and takes precedence over libnccl.so.2.
set(played_nccl_sources nccl.cpp nccl_call.cpp nccl_combine.cpp nccl_communicator.cpp nccl_group.cpp nccl_mailboxes.cpp
                        nccl_unplayed.cpp)
reef_played_library(played_nccl ${played_nccl_sources})
set_target_properties(played_nccl PROPERTIES CXX_VISIBILITY_PRESET hidden)
target_compile_options(played_nccl PRIVATE -ffp-contract=off)
target_link_libraries(played_nccl PRIVATE played_cuda Threads::Threads)

foreach(source nccl_test.cpp nccl_order_test.cpp nccl_trouble_test.cpp)
  cmake_path(GET source STEM test)
  add_executable(played_${test} ${source})
  reef_compile(played_${test})
  target_include_directories(played_${test} PRIVATE "${PROJECT_SOURCE_DIR}/tests")
  target_include_directories(played_${test} SYSTEM PRIVATE ${played_includes} "${REEF_TORCH_ROOT}/include") # c10's 16-bit floats
  target_link_libraries(played_${test} PRIVATE played_nccl played_cuda Threads::Threads GTest::gtest GTest::gtest_main)
  add_test(NAME played.${test} COMMAND played_${test})
  reef_properties(played.${test} FROM ${source} ${played_nccl_sources} runtime.cpp NEEDS played_${test} OTHERS unit device)
  set_tests_properties(played.${test} PROPERTIES PROCESSORS 2)
endforeach()
reef_played_test(
  python.nccl
  FROM test_nccl.py nccl_ranks.py ${played_nccl_sources}
  NEEDS reef_package
  COMMAND ${REEF_TEST_PYTHON} support/preloaded_pytest.py -q -p no:cacheprovider device/runtime/test_nccl.py)
set_tests_properties(played.python.nccl PROPERTIES PROCESSORS 2)
