"""Builds the plugin against the engine's own headers, on the user's machine, and refuses every other pair.

| file | job |
|---|---|
| `pins` | the engine releases that expertier is made for, as data (`recorded_defaults`: their parameters) |
| `engine`, `locate` | the engine on this machine: the installed wheel, or a llama.cpp folder of the user's |
| `headers`, `header_root` | the pinned headers, fetched once; what a folder of headers says about itself |
| `compiler` | a C++17 compiler, and the two libraries made with it |
| `selftest_run`, `defaults` | a try in a child process; the comparison of default parameters |
| `build_info`, `plugin` | what a build recorded; the cache of plugins and `ensure_plugin` |
| `info` | what `expertier engine info` shows |
| `cache`, `hashing`, `progress` | the user's cache folder, SHA-256 of files, messages about progress |

Two commits of llama.cpp may carry the same version number and lay out their structures differently. So
nothing here trusts a version number alone: package, version, source package, engine library and default
parameters are all compared, and each new library has to pass a small computation before it is saved.
"""
