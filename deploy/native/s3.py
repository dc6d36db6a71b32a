"""What every S3 server of ours offers: an endpoint, a key pair, buckets."""

import os
from dataclasses import dataclass
from typing import Any

import boto3
import botocore.loaders
import botocore.session
from botocore.config import Config

REGION = "us-east-1"
_LOADER = botocore.loaders.create_loader()  # keeps S3's model: every bucket of a test makes two clients


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Endpoint:
    """How to reach one S3 server."""

    url: str
    access_key: str
    secret_key: str

    def env(self, bucket: str | None = None) -> dict[str, str]:
        """The environment variables by which nightmill, boto3 and others find it."""
        variables = {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        return variables | ({"NIGHTMILL_BUCKET": bucket} if bucket else {})

    def client(self) -> Any:
        """A boto3 client of this server that looks at no environment variable and no profile."""
        session = botocore.session.Session()
        session.register_component("data_loader", _LOADER)
        return boto3.session.Session(
            botocore_session=session,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=REGION,
        ).client(
            "s3",
            endpoint_url=self.url,
            config=Config(
                s3={"addressing_style": "path"},
                connect_timeout=5,
                read_timeout=30,
                retries={"total_max_attempts": 3, "mode": "standard"},
                proxies={},
            ),
        )

    def create_bucket(self, name: str) -> None:
        """Create a bucket; one that is there already stays as it is."""
        client = self.client()
        try:
            client.create_bucket(Bucket=name)
        except client.exceptions.BucketAlreadyOwnedByYou:
            return
        finally:
            client.close()

    def delete_bucket(self, name: str) -> None:
        """Delete a bucket with all it holds."""
        client = self.client()
        try:
            for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=name):
                for upload in page.get("Uploads", []):
                    client.abort_multipart_upload(Bucket=name, Key=upload["Key"], UploadId=upload["UploadId"])
            for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
                keys = [{"Key": entry["Key"]} for entry in page.get("Contents", [])]
                if keys:
                    client.delete_objects(Bucket=name, Delete={"Objects": keys, "Quiet": True})
            client.delete_bucket(Bucket=name)
        finally:
            client.close()


def local_environment() -> dict[str, str]:
    """Our environment without what points an S3 server or its tools elsewhere."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CEPH_"))}
