// The list of what the proxy counts for one binding: a name and its meaning on each line.
//
// To count something new, add a line and increment `tiers.counters.NAME` where it happens. Everything else reads this
// list: the struct in residency/counters.h, Python (engine_adapter/abi/counters.py), the metrics and docs/counters.md,
// which `python docs/list_counters.py` writes. Counters only grow. A name ends in its unit, if it has one: `_ns` are
// nanoseconds.
#pragma once

#define EXPERTIER_COUNTERS(X)                                                                                          \
    X(graphs, "graphs that held experts of this model")                                                                \
    X(segments, "segments of graphs that were handed to the inner backend")                                            \
    X(lookups, "policy look-ups, one for each layer call or pass")                                                     \
    X(lookup_ns, "time in the policy, without fills")                                                                  \
    X(fills, "calls of Python for missing or streamed experts")                                                        \
    X(fill_ns, "time in the calls that `fills` counts")                                                                \
    X(id_reads, "read-backs of expert ids, one for each layer call")                                                   \
    X(pass_calls, "layer calls that needed more experts than the layer has slots")                                     \
    X(passes, "passes that the layer calls of `pass_calls` took")                                                      \
    X(fully_resident_calls, "layer calls that read no ids: every expert of the layer is in the slot of its number")    \
    X(host_fills, "experts that came from the host pool without Python")                                               \
    X(device_lookups, "layer calls whose ids were looked up on the device")                                            \
    X(device_lookup_waits, "device look-ups that waited for missing experts")                                          \
    X(captures, "graphs that were captured with their device look-ups")                                                \
    X(captured_runs, "runs of captured graphs, each launched at once")                                                 \
    X(device_lookup_fallbacks, "graphs that were begun with device look-ups and run again without them")               \
    X(device_lookups_late, "fallbacks after the device had given up waiting for an answer")                            \
    X(predicted, "experts that device look-ups asked for where a prediction had been made")                            \
    X(predicted_right, "experts among `predicted` that the prediction named")                                          \
    X(missing, "experts among `predicted` that were in no slot when the prediction was made")                          \
    X(missing_predicted, "experts among `missing` that the prediction named")                                          \
    X(prefetches, "experts whose copies began before a layer asked for them")                                          \
    X(prefetches_useful, "prefetched experts that the layer then asked for")                                           \
    X(prefetches_in_time, "useful prefetches whose last byte had been queued when the layer asked")                    \
    X(prefetch_bytes, "bytes that were prefetched")                                                                    \
    X(prefetch_wasted_bytes, "prefetched bytes of experts that the layer did not ask for")                             \
    X(prefetch_pauses, "how often prefetching was found not to pay")                                                   \
    X(streamed_calls, "layer calls that ran on a streamed layer")                                                      \
    X(streamed_bytes, "bytes that came from the host for streamed layers")                                             \
    X(dropped_writes, "bytes that the loader wrote to expert tensors and the buffer dropped")

// Values as of now, which may fall as well as rise.
#define EXPERTIER_GAUGES(X) X(prefetch_layers, "how many layers ahead experts are predicted now; 0: none are")
