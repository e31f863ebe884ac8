// The driver calls that capture streams and launch what was captured.
#pragma once

namespace fake_gpu {

// capture_begin, capture_end, graph_instantiate, graph_launch, graph_exec_destroy, graph_destroy, with the arguments and
// codes of both vendors' drivers, and graph_exec_update as CUDA's.
void get_graph_calls(void ** out);

} // namespace fake_gpu
