"""Recordings of tiny models without the command line, and what is in a file."""

import h5py
import numpy as np
import tiny_models

from hae import recorder, trace
from hae.prompts import Prompt, prepare

ORIGIN = trace.Origin(recorder="test 0", libraries="numpy 0", command="test")


def job_of(model, reader, name, text, path, images=()):
    prompt = Prompt(name, text, list(images))
    return recorder.Job(prompt, prepare(model, reader, prompt), path)


def record_jobs(model, jobs, reader=None, **settings):
    """One batch. Returns what was recorded."""
    reader = reader or tiny_models.tokenizer()
    return recorder.Recorder(
        model,
        getattr(reader, "tokenizer", reader),
        recorder.Settings(**{"dtype": "float32", "max_new_tokens": 3} | settings),
        ORIGIN,
        model_name="tiny",
    ).record(jobs)


def record_one(model, text, path, images=(), reader=None, **settings):
    """One sequence. Returns what was recorded and the inputs."""
    job = job_of(model, reader or tiny_models.tokenizer(), "p", text, path, images)
    return record_jobs(model, [job], reader, **settings)[0], job.inputs


def contents(trace_file):
    """Everything of its sequences: attributes, and datasets as bytes."""
    found = {}

    def take(name, item):
        found[name] = {key: np.asarray(value).tolist() for key, value in item.attrs.items()}
        if isinstance(item, h5py.Dataset):
            found[name] |= {"dtype": str(item.dtype), "shape": item.shape}
            found[name]["bytes"] = np.ascontiguousarray(item[()]).tobytes()

    with h5py.File(trace_file, "r") as file:
        file["sequences"].visititems(take)
    return found
