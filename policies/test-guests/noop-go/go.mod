module example.com/noop

go 1.24
