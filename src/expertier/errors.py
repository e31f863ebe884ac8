"""The one exception tree of expertier.

    ExpertierError
    ├── ConfigError             a variable or option that does not parse, is unknown or is not supported here
    ├── ModelError              the GGUF cannot be used
    │   ├── NotGgufError            the file is not a GGUF
    │   ├── TruncatedModelError     the file is shorter than its own header says
    │   ├── NotMoeError             the GGUF has no routed experts
    │   └── UnsupportedLayoutError  the experts have a layout that we do not know
    ├── BudgetError             a budget below what the model needs
    ├── BusyError               leases or an engine hold slots that the call would move or free
    ├── LeaseError              a lease released twice, or used after its release
    ├── SourceError             expert bytes could not be read, or the file changed
    ├── DeviceError             a device call failed or a device is not there
    │   └── DriverError             a call of a GPU's driver returned an error code
    └── EngineError             the inference engine or our plugin for it
        ├── EngineMissingError      no engine installed, or no such folder
        ├── EngineMismatchError     another version, layout or library than the plugin was built for
        ├── BuildError              the plugin could not be compiled
        └── DecodeError             the engine returned an error status for a decode

Every message says what was asked, what was found, what the limit is and what to do. These errors are for the user's
input and the machine's failures; `assert` is for our own bugs.
"""

from __future__ import annotations


class ExpertierError(Exception):
    """Base of every error that expertier raises on purpose."""


class ConfigError(ExpertierError):
    """A variable or an option that cannot be used as given."""


class ModelError(ExpertierError):
    """The model file cannot be used."""


class NotGgufError(ModelError):
    """The file is not a GGUF."""


class TruncatedModelError(ModelError):
    """The file ends before the data that its header lists."""


class NotMoeError(ModelError):
    """The model has no routed experts, so there is nothing to tier."""


class UnsupportedLayoutError(ModelError):
    """The experts are stored in a way that expertier does not know."""


class BudgetError(ExpertierError):
    """A budget is below what the model needs."""


class BusyError(ExpertierError):
    """What the call would change is in use."""


class LeaseError(ExpertierError):
    """A lease was released twice or used after its release."""


class SourceError(ExpertierError):
    """Expert bytes could not be read from their source."""


class DeviceError(ExpertierError):
    """A device call failed, or the device is not there."""


class DriverError(DeviceError):
    """A call of a GPU's driver returned an error code.

    `call` is the driver's name of the call, and `code` the error code; the message has the vendor's name for the code.
    """

    def __init__(self, message: str, *, call: str, code: int) -> None:
        """Keep the call and the code beside the message."""
        super().__init__(message)
        self.call = call
        self.code = code


class EngineError(ExpertierError):
    """The inference engine, or our plugin for it, cannot be used."""


class EngineMissingError(EngineError):
    """No engine is installed where one was looked for."""


class EngineMismatchError(EngineError):
    """The engine is not the one that the plugin was built against."""


class BuildError(EngineError):
    """The plugin could not be compiled."""


class DecodeError(EngineError):
    """The engine returned an error status for a decode."""
