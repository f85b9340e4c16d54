"""The messages of serving, in a private descriptor pool so that tensorflow can be imported in the same process.

The full names are the original ones (`tensorflow.serving.PredictRequest` and so on), as clients, `Any` type URLs and
server reflection expect. In protobuf's default pool they would make `import tensorflow_serving` fail.
`generate.py` writes the modules here from the `.proto` files.
"""
