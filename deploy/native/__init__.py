"""PostgreSQL, RabbitMQ and S3 servers as plain processes, for `make up`, the tests and the chaos run."""
