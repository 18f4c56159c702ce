// From CUDA C++ to a shared library of kernels, by way of g++.
#pragma once
#include <string>
#include <vector>

namespace emulated {

struct Source {
    std::string name, text;
    // g++'s: macros, include paths, the dialect.
    std::vector<std::string> flags;
    bool fmad = true;
    // Whether the source may rely on nothing but what NVRTC has built in.
    bool bare = false;
    // What else the library depends on: the contents of files that may be included.
    std::string dependencies;
};

struct Compiled {
    std::string object; // the library's path, or nothing
    std::string log;
};

Compiled compile(const Source &source);

// Kernels as text, in the place of PTX: either the library's name, or the file to compile.
std::string image_of_object(const std::string &object);
std::string image_of_file(const std::string &path, const std::vector<std::string> &options);
// The library that an image stands for, compiled if that has not been done.
Compiled load_image(const std::string &image);
// As `nvcc` calls it.
Compiled compile_file(const std::string &path, const std::vector<std::string> &options);

// Takes CUDA's own words out of a preprocessed source, and appends what describes its kernels.
// A kernel without launch bounds gets `unbounded`.
std::string rewrite(const std::string &preprocessed, const char *unbounded);

// The folder with `lib`, `cache` and the sources of what kernels include.
std::string root();

} // namespace emulated
