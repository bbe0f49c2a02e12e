"""Data parallelism for PyTorch that is a function: exact and fast, in one process.

>>> import torch, funcpar as fp
>>> step = fp.pmap(fp.value_and_grad(lambda w, x: ((x @ w) ** 2).mean()))
>>> loss, grads = step(torch.ones(2), torch.ones(5, 2))
>>> loss, grads
(tensor(4.), tensor([4., 4.]))
"""

from funcpar import tree as tree
from funcpar._call import parallel_call as parallel_call
from funcpar._devices import Device as Device
from funcpar._devices import devices as devices
from funcpar._devices import set_cpu_devices as set_cpu_devices
from funcpar._errors import CollectiveTimeoutError as CollectiveTimeoutError
from funcpar._errors import ReplicaMismatchError as ReplicaMismatchError
from funcpar._errors import UnboundAxisError as UnboundAxisError
from funcpar._functional import functionalize as functionalize
from funcpar._functional import functionalize_with_buffers as functionalize_with_buffers
from funcpar._grad import grad as grad
from funcpar._grad import value_and_grad as value_and_grad
from funcpar._pmap import pmap as pmap
from funcpar._staging import Shards as Shards
