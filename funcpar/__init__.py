"""Data parallelism for PyTorch that is a function, with the numbers of one device on any number.

>>> import torch, funcpar as fp
>>> step = fp.pmap(fp.value_and_grad(lambda w, x: ((x @ w) ** 2).mean()))
>>> loss, grads = step(torch.ones(2), torch.ones(5, 2))
>>> loss, grads
(tensor(4.), tensor([4., 4.]))
"""

from funcpar import distributed as distributed
from funcpar import tree as tree
from funcpar._batchnorm import SyncBatchNorm as SyncBatchNorm
from funcpar._call import parallel_call as parallel_call
from funcpar._check import check as check
from funcpar._collectives import axis_index as axis_index
from funcpar._collectives import axis_size as axis_size
from funcpar._collectives import pmax as pmax
from funcpar._collectives import pmean as pmean
from funcpar._collectives import pmin as pmin
from funcpar._collectives import psum as psum
from funcpar._devices import Device as Device
from funcpar._devices import devices as devices
from funcpar._devices import set_cpu_devices as set_cpu_devices
from funcpar._errors import CollectiveTimeoutError as CollectiveTimeoutError
from funcpar._errors import ProcessFailedError as ProcessFailedError
from funcpar._errors import ReplicaMismatchError as ReplicaMismatchError
from funcpar._errors import UnboundAxisError as UnboundAxisError
from funcpar._functional import functionalize as functionalize
from funcpar._functional import functionalize_with_buffers as functionalize_with_buffers
from funcpar._gathers import all_gather as all_gather
from funcpar._gathers import all_to_all as all_to_all
from funcpar._gathers import psum_scatter as psum_scatter
from funcpar._gathers import pswapaxes as pswapaxes
from funcpar._grad import grad as grad
from funcpar._grad import value_and_grad as value_and_grad
from funcpar._permutations import pbroadcast as pbroadcast
from funcpar._permutations import ppermute as ppermute
from funcpar._permutations import pshuffle as pshuffle
from funcpar._pmap import pmap as pmap
from funcpar._prefetch import prefetch as prefetch
from funcpar._prefetch import stage as stage
from funcpar._staging import Shards as Shards
