// The engine's own generator of small models of every architecture, as a function: its source is a program's, which comes
// from the engine's source package and is not ours. It finds the rest of the engine in the library that is loaded.

#define main run_generator
#include "test-llama-archs.cpp"
#undef main

extern "C" __attribute__((visibility("default"))) int generate_models(int argc, char ** argv) {
    return run_generator(argc, argv);
}
