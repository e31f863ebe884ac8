#include "residency/errors.h"

#include "abi/embedded.h"

namespace expertier {

namespace {

thread_local std::string last_error;

} // namespace

void set_error(const std::string & message) {
    last_error = message;
    say_in_tool(message);
}

std::string take_error() {
    std::string error;
    error.swap(last_error);
    return error;
}

} // namespace expertier
