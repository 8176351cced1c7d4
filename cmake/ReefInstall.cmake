# find_package(Reef CONFIG) for other projects, from `cmake --install` and from the Python package alike.
if(SKBUILD)
  set(CMAKE_INSTALL_LIBDIR lib)
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(REEF_CMAKE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/Reef")
# In a wheel (reef/lib beside torch/lib in site-packages) torch is found by its place, elsewhere by its path.
if(SKBUILD)
  set_target_properties(reef PROPERTIES INSTALL_RPATH "$ORIGIN/../../torch/lib")
else()
  set_target_properties(reef PROPERTIES INSTALL_RPATH "${REEF_TORCH_ROOT}/lib")
endif()
install(
  TARGETS reef
  EXPORT ReefTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT reef)
install(
  DIRECTORY include/reef
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT reef
  FILES_MATCHING
  PATTERN "*.h")
install(
  EXPORT ReefTargets
  NAMESPACE reef::
  DESTINATION ${REEF_CMAKE_DIR}
  COMPONENT reef)
configure_package_config_file(cmake/ReefConfig.cmake.in "${PROJECT_BINARY_DIR}/ReefConfig.cmake"
                              INSTALL_DESTINATION ${REEF_CMAKE_DIR})
write_basic_package_version_file("${PROJECT_BINARY_DIR}/ReefConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(
  FILES "${PROJECT_BINARY_DIR}/ReefConfig.cmake" "${PROJECT_BINARY_DIR}/ReefConfigVersion.cmake" cmake/ReefTorch.cmake
  DESTINATION ${REEF_CMAKE_DIR}
  COMPONENT reef)
