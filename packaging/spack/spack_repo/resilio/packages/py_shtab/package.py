from spack_repo.builtin.packages.py_shtab.package import PyShtab as BuiltinPyShtab

from spack.package import *


class PyShtab(BuiltinPyShtab):
    __doc__ = BuiltinPyShtab.__doc__

    version("1.13.0", sha256="0a5be9d7ab2b4549e9a38252abcd5ecf5ec6813ecd80c6b06fa851bff55a5085")
