from spack_repo.builtin.packages.py_submitit.package import PySubmitit as BuiltinPySubmitit

from spack.package import *


class PySubmitit(BuiltinPySubmitit):
    __doc__ = BuiltinPySubmitit.__doc__

    version("1.5.4", sha256="7100848bd1cdda79c7196e54ee830793ae75fd7adde0c5bef738d72360a07508")
