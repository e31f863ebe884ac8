"""Tests on devices of a real llama.cpp that the environment names.

| variable | meaning |
|---|---|
| EXPERTIER_TEST_DEVICES | one device or two of a kind, in the engine's order: `CUDA0,CUDA1` |
| EXPERTIER_TEST_LLAMA_CPP | the folder of the llama.cpp build that has them; else the installed wheel |

`RPC0,RPC1` are servers that the tests start from that build, on this machine. `FAKE0,FAKE1` are the fake GPUs, to try
the tests themselves: they complain of what hardware lets pass.

| file | job |
|---|---|
| `process.py` | the process that has the engine, and the skips that say what is missing |
| `models.py` | models on one of them or both, stock and through the tiers |
| `speculation.py` | greedy speculative decoding with a draft model |
| `driver.py` | what the vendor's driver says of an address |
| `splits.py` | what the engine's scheduler copies between devices |
"""
