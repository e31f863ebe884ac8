// Nothing may be thrown into Python's C frames: an exception becomes an error value.
#pragma once

#include <exception>

namespace expertier {

template <typename Result, typename Function> Result guarded(Result on_error, Function function) noexcept {
    try {
        return function();
    } catch (...) {
        return on_error;
    }
}

} // namespace expertier
