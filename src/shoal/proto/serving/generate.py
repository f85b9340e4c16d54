"""`python -m shoal.proto.serving.generate` writes `*_pb2.py` and `*_pb2.pyi` in this folder; it needs grpcio-tools."""

import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    from grpc_tools import protoc  # pyrefly: ignore

    source = HERE.parents[2]
    protos = [str(path.relative_to(source)) for path in sorted(HERE.glob("*.proto"))]
    include = Path(protoc.__file__).parent / "_proto"
    code = protoc.main(
        ["protoc", f"-I{source}", f"-I{include}", f"--python_out={source}", f"--pyi_out={source}", *protos]
    )
    for path in HERE.glob("*_pb2.py"):
        text = path.read_text()
        text = text.replace("from google.protobuf import descriptor_pool as _descriptor_pool\n", "")
        text = text.replace("_descriptor_pool.Default()", "_pool.POOL")
        first, rest = text.split("from google.protobuf import descriptor as", 1)
        path.write_text(
            first + "from shoal.proto.serving import pool as _pool\nfrom google.protobuf import descriptor as" + rest
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
