"""Fetch a checkpoint's files from the Hugging Face hub into its cache, through `huggingface_hub`.

HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE mean what they mean everywhere. Without network a complete cached copy serves.
Knows which files a model consists of by name; what is in them is `hf_directory`'s.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from arctool.bake.source.hf_directory import ASSET_NAMES
from arctool.bake.source.terms import LICENCE_PATTERNS, SOURCE_CARD
from arctool.errors import SourceError, StorageError

WANTED = ("config.json", "*.safetensors", "model.safetensors.index.json", *ASSET_NAMES, *LICENCE_PATTERNS, SOURCE_CARD)
"""File name patterns that are fetched."""

UNWANTED = ("*/*", "consolidated*.safetensors")
"""Folders (other formats, other precisions) and Mistral's second copy of the weights."""

logger = logging.getLogger(__name__)


def fetch_snapshot(repo: str, revision: str | None = None) -> Path:
    """The local folder with the files of `repo` (`org/name`) at `revision` (branch, tag or commit; the default branch if None).

    Raises SourceError for everything the hub or the network refuses, StorageError where the cache cannot be written.
    """
    where = f"{repo}@{revision}" if revision else repo
    logger.info("fetching %s from the hub", where)
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            endpoint=os.environ.get("HF_ENDPOINT") or None,
            allow_patterns=list(WANTED),
            ignore_patterns=list(UNWANTED),
        )
    except GatedRepoError as error:
        raise SourceError(
            f"{where}: the repository is gated; accept its conditions on its page and set HF_TOKEN to a token that may read it"
        ) from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"{where}: no such repository on the hub, or a private one; check the spelling, or set HF_TOKEN to a token that may read it"
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{where}: the repository has no branch, tag or commit {revision}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise SourceError(
            f"{where}: the hub cannot be reached and the cache has no complete copy; check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        ) from error
    except HFValidationError as error:
        raise SourceError(f"{where}: not a valid hub id: {_line(error)}") from error
    except HfHubHTTPError as error:
        raise SourceError(f"{where}: the hub answered with an error ({_line(error)}); try again later") from error
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise StorageError(f"{where}: the hub cache cannot be written: {_line(error)}; set HF_HOME to a writable folder") from error
    except Exception as error:  # the client lets its HTTP library's own errors through, and which library that is changes
        if isinstance(error, OSError) and error.errno is not None and error.strerror and error.filename:
            raise StorageError(f"{where}: the hub cache cannot be written: {_line(error)}") from error
        raise SourceError(
            f"{where}: the download broke off ({type(error).__name__}: {_line(error)}); run the same command again, finished files are kept"
        ) from error
    return Path(folder)


def _line(error: BaseException) -> str:
    """The first line of an error's text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
