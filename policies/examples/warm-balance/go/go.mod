module example.com/warm-balance

go 1.24
