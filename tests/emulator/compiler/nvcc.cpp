// In nvcc's place for candle's build: compiles kernels for the emulated GPU, and its quantised kernels,
// which the crate never calls, to nothing.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>

#include "compiler.hpp"

using namespace emulated;

int main(int count, char **arguments) {
    std::string output, folder, mode, source;
    std::vector<std::string> options;
    for (int i = 1; i < count; i++) {
        std::string word = arguments[i];
        auto next = [&] { return i + 1 < count ? arguments[++i] : ""; };
        if (word == "--version") {
            std::cout << "nvcc: the emulated GPU's\n\n\nCuda compilation tools, release 13.0, V13.0.88\n";
            return 0;
        }
        if (word == "-c" || word == "--ptx" || word == "--lib")
            mode = word;
        else if (word == "-o")
            output = next();
        else if (word == "--output-directory")
            folder = next();
        else if (word.rfind("-std=", 0) == 0 || word.rfind("-D", 0) == 0 || word.rfind("-I", 0) == 0)
            options.push_back(word);
        else if (word.size() > 3 && word.substr(word.size() - 3) == ".cu")
            source = word;
    }
    if (mode == "--lib") { // an archive without members
        std::ofstream(output) << "!<arch>\n";
        return 0;
    }
    if (mode == "-c") {
        std::ofstream file(output);
        return 0;
    }
    if (mode != "--ptx" || source.empty()) {
        std::cerr << "nvcc: asked for something other than -c, --ptx or --lib\n";
        return 1;
    }
    char path[4096];
    if (!realpath(source.c_str(), path)) {
        perror(source.c_str());
        return 1;
    }
    source = path;
    std::string name = source.substr(source.rfind('/') + 1);
    if (output.empty())
        output = folder + "/" + name.substr(0, name.size() - 3) + ".ptx";
    if (name != "quantized.cu") {
        Compiled compiled = compile_file(source, options);
        if (compiled.object.empty()) {
            std::cerr << compiled.log;
            return 1;
        }
    }
    std::ofstream(output) << image_of_file(source, options);
    return 0;
}
