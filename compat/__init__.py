"""The names of torch.nn.parallel over funcpar: the same spelling, any device, without their known faults.

>>> import compat, torch
>>> model = compat.DataParallel(torch.nn.Linear(3, 2))
>>> model(torch.ones(5, 3)).shape
torch.Size([5, 2])
"""

from compat import _functional as _functional
from compat._data_parallel import DataParallel as DataParallel
from compat._data_parallel import data_parallel as data_parallel
from compat._distributed import DistributedDataParallel as DistributedDataParallel
from compat._gather import gather as gather
from compat._install import install as install
from compat._install import uninstall as uninstall
from compat._parallel_apply import parallel_apply as parallel_apply
from compat._replicate import replicate as replicate
from compat._scatter import scatter as scatter
from compat._scatter import scatter_kwargs as scatter_kwargs
