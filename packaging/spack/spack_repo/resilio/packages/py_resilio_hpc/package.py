from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyResilioHpc(PythonPackage):
    """Keeps large training and MPI jobs making progress on Slurm clusters, whatever breaks."""

    pypi = "resilio_hpc/resilio_hpc-0.1.0.tar.gz"

    license("Apache-2.0")

    # no checksum: the sdist of the release that is installed (spack install --no-checksum, or spack develop)
    version("0.1.0")

    variant("torch", default=True, description="training with PyTorch, and its formats of checkpoints")
    variant("mpi", default=False, description="MPI programs in Python")
    variant("submitit", default=False, description="jobs from Python")
    variant("gpu", default=False, description="health checks of NVIDIA GPUs")
    variant("safetensors", default=False, description="export and import of safetensors")
    variant("metrics", default=False, description="samples for Prometheus")
    variant("notify", default=False, description="messages by Apprise")
    variant("s3", default=False, description="checkpoints in an object store")
    variant("site", default=True, description="completion and manual pages")

    # the extensions of resilio_hpc.native, and the libraries that ranks get by LD_PRELOAD
    depends_on("c", type="build")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")

    with default_args(type=("build", "run")):
        depends_on("py-numpy@1.23:")
        depends_on("py-h5py@3.7:")
        depends_on("py-rich@12:")
        depends_on("py-pyzmq@24:")
        depends_on("py-cryptography@38:")
        depends_on("py-msgspec@0.18.5:")
        depends_on("py-psutil@5.9:")
        depends_on("py-typing-extensions@4.4:")
        depends_on("py-tomli@2:", when="^python@:3.10")

        depends_on("py-torch@2.6:", when="+torch")
        depends_on("py-mpi4py@4.0:", when="+mpi")
        depends_on("py-submitit@1.5:", when="+submitit")
        depends_on("py-nvidia-ml-py@12:", when="+gpu")
        depends_on("py-safetensors@0.4.3:", when="+safetensors")
        depends_on("py-prometheus-client@0.20:", when="+metrics")
        depends_on("py-apprise@1.8:", when="+notify")
        depends_on("py-boto3@1.36:", when="+s3")
        depends_on("py-shtab@1.13:", when="+site")

    import_modules = ["resilio_hpc", "resilio_hpc.native", "resilio_hpc.ckpt", "resilio_hpc.slurm"]

    @run_after("install")
    def completion_and_manual_pages(self):
        if self.spec.satisfies("+site"):
            python("-m", "resilio_hpc.cli.main", "site", "install", self.prefix)
