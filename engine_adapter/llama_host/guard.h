// No exception may pass through Python's C frames, so an exception becomes an error value.
#pragma once

#include <cxxabi.h>

namespace expertier {

template <typename Result, typename Function> Result guarded(Result on_error, Function function) {
    try {
        return function();
    } catch (abi::__forced_unwind &) {
        throw; // Python ends a thread that asks for its lock while the process ends, and that must not be stopped
    } catch (...) {
        return on_error;
    }
}

} // namespace expertier
