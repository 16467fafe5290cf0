# Enables CUDA where nvcc is and works with this host compiler. Sets CMAKE_CUDA_COMPILER, or says why not.
find_program(HAE_NVCC nvcc HINTS ENV CUDA_HOME /usr/local/cuda PATH_SUFFIXES bin)
if(NOT HAE_NVCC)
  message(STATUS "nvcc not found: the device backend is built for the CPU systems of Thrust only")
  return()
endif()
set(CMAKE_CUDA_ARCHITECTURES "80;90" CACHE STRING "GPU architectures to build for")
if(NOT CMAKE_CUDA_COMPILER)
  # Asked before CMake does, so that an unsuitable host compiler is one clear line.
  file(WRITE ${CMAKE_BINARY_DIR}/nvcc_works.cu "__global__ void nothing() {}\n")
  execute_process(COMMAND ${HAE_NVCC} -std=c++20 -ccbin ${CMAKE_CXX_COMPILER} -c ${CMAKE_BINARY_DIR}/nvcc_works.cu
                          -o ${CMAKE_BINARY_DIR}/nvcc_works.o RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    string(STRIP "${output}" output)
    message(FATAL_ERROR "${HAE_NVCC} does not work with ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}; use a "
                        "compiler it supports, or -DHAE_CUDA=OFF. It says:\n${output}")
  endif()
  set(CMAKE_CUDA_COMPILER ${HAE_NVCC})
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
endif()
enable_language(CUDA)
# CMake 3.25 knows no C++20 for nvcc; contraction is off as everywhere; a conversion of a view of constants to
# itself, which is never called, is no reason to warn.
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-fmad=false;--diag-suppress=554>")
